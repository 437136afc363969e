"""The commands: plan, partitions, diff, doctor, verify and migrate.

No other room imports them.
"""
