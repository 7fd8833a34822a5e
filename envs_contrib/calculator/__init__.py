"""Calculator: arithmetic word problems that take one to three calls of a calculator."""

from envs_contrib.calculator.env import Calculator

__all__ = ["Calculator"]
