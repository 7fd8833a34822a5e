"""The packages of the repositories, correct: their text is what an agent is given, with one mistake in it."""
