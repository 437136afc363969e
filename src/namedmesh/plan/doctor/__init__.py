"""The command ``doctor``: the ranks of a job check every group of a layout, and measure it."""
