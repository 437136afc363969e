const data = JSON.parse(document.getElementById("layout").textContent), get = id => document.getElementById(id);
const cells = [...document.querySelectorAll(".rank")], nodes = get("nodes");
const color = get("axis"), outlined = get("outline"), picked = get("rank"), zoom = get("zoom"), who = get("who");
const axisOf = name => data.axes.find(axis => axis.name === name);
const at = (rank, axis) => axis.runs.reduce((n, [size, stride]) => n * size + Math.floor(rank / stride) % size, 0);
const shadeOf = (axis, place) => axis.shades[Math.floor(place * axis.shades.length / axis.size)];
const firstOf = cell => +cell.dataset.rank, countOf = cell => +cell.dataset.count;
function peers(rank, axis) {
  return axis.peers.reduce((ranks, [size, stride]) => ranks.flatMap(first =>
    Array.from({ length: Math.min(size, 1e6) }, (_, i) => first + (i - Math.floor(rank / stride) % size) * stride)), [rank]);
}
function places(cell, axis) {
  if (countOf(cell) === 1) return [at(firstOf(cell), axis)];
  const [size, stride] = axis.runs[0], start = Math.floor(firstOf(cell) / stride);
  const steps = Math.min(Math.floor((firstOf(cell) + countOf(cell) - 1) / stride) - start + 1, size), shown = Math.min(steps, 16);
  return Array.from({ length: shown }, (_, i) => (start + Math.floor(i * steps / shown)) % size);
}
function paint() {
  const axis = axisOf(color.value);
  for (const cell of cells) {
    const shades = places(cell, axis).map(place => shadeOf(axis, place)), plain = shades.length === 1;
    const stripes = shades.map((shade, i) => `${shade[0]} ${i * 100 / shades.length}% ${(i + 1) * 100 / shades.length}%`);
    cell.style.background = plain ? shades[0][0] : `linear-gradient(90deg, ${stripes}) bottom / 100% .4em no-repeat var(--node)`;
    cell.style.color = plain ? shades[0][1] : "var(--ink)";
  }
  const legend = get("legend"), step = Math.ceil(axis.size / 16);
  legend.replaceChildren();
  for (let i = 0; i < axis.size; i += step) {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = shadeOf(axis, i)[0];
    item.append(swatch, `${axis.name} ${i}`);
    legend.append(item);
  }
  if (step > 1) legend.append(`... ${axis.size - 1}`);
}
function outline() {
  const axis = axisOf(outlined.value);
  for (const cell of cells) {
    const slot = cell.parentElement, rank = firstOf(cell);
    slot.className = "slot";
    if (!axis || axis.size === 1 || data.block > 1) continue;
    const group = peers(rank, axis), low = Math.min(...group), high = Math.max(...group);
    const joined = other => other && group.includes(firstOf(other.firstElementChild));
    const whole = high - low === group.length - 1;  // the ranks follow each other
    slot.classList.add("in");
    slot.classList.toggle("start", whole ? rank === low : !joined(slot.previousElementSibling));
    slot.classList.toggle("end", whole ? rank === high : !joined(slot.nextElementSibling));
    slot.classList.toggle("crosses", data.node > 0 && Math.floor(low / data.node) !== Math.floor(high / data.node));
  }
}
function say(text, refused) {
  who.textContent = text;
  who.classList.toggle("refused", refused);
  picked.setAttribute("aria-invalid", refused);
}
function pick(focus) {
  const text = picked.value.trim(), rank = Number(text);
  const valid = text !== "" && Number.isInteger(rank) && rank >= 0 && rank < data.world;
  const tags = new Map(), own = Math.floor(rank / data.block);
  for (const axis of valid ? data.axes : [])
    for (const mate of axis.tagged ? peers(rank, axis) : []) {
      const block = Math.floor(mate / data.block);
      if (block !== own) tags.set(block, (tags.get(block) ?? new Set()).add(axis.name));
    }
  cells.forEach((cell, i) => {
    const block = Math.floor(firstOf(cell) / data.block), tag = tags.get(block);
    cell.classList.toggle("self", valid && block === own);
    cell.classList.toggle("peer", valid && tag !== undefined);
    if (tag) cell.dataset.tag = [...tag].join(" "); else delete cell.dataset.tag;
    cell.tabIndex = (valid ? block === own : i === 0) ? 0 : -1;
    if (valid && focus && block === own) cell.focus();
  });
  if (valid) say(`rank ${rank}: ` + data.axes.map(axis => `${axis.name} ${at(rank, axis)}`).join(", "), false);
  else if (text === "" && !picked.validity.badInput) say("pick a rank", false);
  else say(`rank ${text} is not one of 0 to ${data.world - 1}`, true);
  who.parentElement.classList.toggle("picked", valid);
  const body = get("places");
  body.replaceChildren();
  for (const axis of data.axes) {
    const row = body.insertRow(), all = valid ? peers(rank, axis) : [], listed = all.slice(0, 32).join(", ");
    const ranks = all.length === 1 ? "alone" : listed + (all.length > 32 ? `, ... (${all.length})` : "");
    for (const text of [axis.name, valid ? `${at(rank, axis)} of 0 to ${axis.size - 1}` : axis.size, ranks, axis.where])
      row.insertCell().textContent = text;
  }
}
function fit() {
  let size = 22.5;
  const over = () => nodes.getBoundingClientRect().bottom + scrollY + 44 > innerHeight;
  const ragged = () => {  // a node whose ranks break into lines of different lengths
    const slots = [...nodes.querySelector(".row").children];
    return data.block === 1 && slots.length % slots.filter(slot => slot.offsetTop === slots[0].offsetTop).length;
  };
  do nodes.style.fontSize = `${size -= 0.5}px`; while (size > 8 && (over() || ragged()));
  if (over()) nodes.style.fontSize = `${size = innerWidth > 700 ? 9 : 12}px`;
  zoom.value = size;
}
function move(event) {
  const i = cells.indexOf(event.target), box = event.target.getBoundingClientRect();
  const steps = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: cells.length - 1 }, down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const away = cell => {  // the nearest row first, and in it the nearest column
    const other = cell.getBoundingClientRect(), far = (other.top - box.top) * down;
    return far > 2 ? far * 1e4 + Math.abs(other.left - box.left) : Infinity;
  };
  const beyond = down ? cells.filter(cell => away(cell) < Infinity) : [];
  const target = beyond.length ? beyond.reduce((a, b) => away(b) < away(a) ? b : a) : cells[steps[event.key]];
  if (!target) return;
  event.preventDefault();
  picked.value = firstOf(target);
  pick(true);
}
color.addEventListener("change", paint);
outlined.addEventListener("change", outline);
picked.addEventListener("input", () => pick());
zoom.addEventListener("input", () => { nodes.style.fontSize = `${zoom.value}px`; });
get("fit").addEventListener("click", fit);
document.querySelector("form").addEventListener("submit", event => event.preventDefault());
get("none").addEventListener("click", () => { picked.value = ""; pick(); });
nodes.addEventListener("keydown", event => { if (event.target.matches(".rank")) move(event); });
for (const cell of cells) cell.addEventListener("click", () => { picked.value = firstOf(cell); pick(); });
paint();
outline();
pick();
fit();
