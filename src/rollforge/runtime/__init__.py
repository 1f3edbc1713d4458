"""Hosts plain Python objects as roles, each in its own process or all in this one. The only room with Monarch."""

from rollforge.runtime.errors import RoleDied, RoleError, RoleTimeout, log_tail
from rollforge.runtime.handle import Handle
from rollforge.runtime.runtime import Runtime
from rollforge.runtime.spec import RoleSpec

__all__ = ["Handle", "RoleDied", "RoleError", "RoleSpec", "RoleTimeout", "Runtime", "log_tail"]
