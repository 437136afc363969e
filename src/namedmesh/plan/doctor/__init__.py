"""The doctor: real ranks check every group of a layout, and measure it."""
