"""Where blocks live when they leave the device: host and disk, transfers, the load-or-compute decision."""
