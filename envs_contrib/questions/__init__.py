"""Multiple choice about weekdays: one question, one letter."""

from envs_contrib.questions.env import CalendarQuestions

__all__ = ["CalendarQuestions"]
