"""Every heavy operation, in one table that is resolved once per device, with reasons.

Signatures, backends and their choice belong here; how layers use operations belongs in `nn/`.
"""

from ridgeline.ops.devices import Device, devices, open_table, resolve_device
from ridgeline.ops.table import Choice, OpsTable

__all__ = ["Choice", "Device", "OpsTable", "devices", "open_table", "resolve_device"]
