"""Meetings: mails that ask for changes of calendars, and a policy that forbids some of them."""

from envs_contrib.meetings.env import Meetings

__all__ = ["Meetings"]
