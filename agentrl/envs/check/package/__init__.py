"""The static checks of RFC 008 that a folder of OpenEnv answers: nothing of it is run or imported."""
