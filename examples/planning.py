"""Compare the layouts of a job before any GPU is there: ``python examples/planning.py``."""

from namedmesh import Layout, plan

WORLD = 64

# Who is with whom is arithmetic, for any number of ranks, without torch.
layout = Layout(pp=2, dp=-1, tp=8, world_size=WORLD)
print(f"{layout}: rank 9 is at {layout.coords(9)}; its dp group: {layout.group(9, 'dp')}")

# Of the layouts that fit, which trains this model fastest, and why?
model = plan.Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
job = plan.Job(model=model, hardware=plan.load_hardware("h100"), seq=8192, global_batch=128)
partitions = plan.list_partitions(WORLD, job)
print(f"{len(partitions)} layouts, {sum(each.fits for each in partitions)} fit")
best = plan.best_partitions(partitions, 3)
for each in best:
    print(f"tp={each.tp} cp={each.cp} pp={each.pp} dp={each.dp}: {each.policies}")
print(plan.explain(best[0], best[1]))
print(best[0].call)
