"""Every heavy operation, behind one table that is resolved once per device, with reasons."""

from ridgeline.ops.devices import Device, devices, open_table, resolve_device
from ridgeline.ops.table import Choice, OpsTable

__all__ = ["Choice", "Device", "OpsTable", "devices", "open_table", "resolve_device"]
