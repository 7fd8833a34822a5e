"""Environments in the formats of other libraries: `agentrl envs export`."""

from agentrl.envs.export.package import FORMATS, WrittenPackage, export_env, lost_in

__all__ = ["FORMATS", "WrittenPackage", "export_env", "lost_in"]
