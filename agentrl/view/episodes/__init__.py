"""Every episode of a folder's journals, as pages that open from a disk: `agentrl view`."""

from agentrl.view.episodes.site import Decoder, Site, write_site

__all__ = ["Decoder", "Site", "write_site"]
