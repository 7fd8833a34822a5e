"""The table of generators. It imports nothing, so that ids are listed without the library."""

from __future__ import annotations

from collections.abc import Mapping

# What needs no knowledge earns so much: the best of all constant answers, or of those that are copied from
# the question, as where a scorer pays for a part of the answer.
CHANCES: Mapping[str, float] = {
    "ab": 0.020,
    "acre": 0.409,
    "advanced_geometry": 0.075,
    "aiw": 0.205,
    "arc_1d": 0.010,
    "arc_agi": 0.074,
    "base_conversion": 0.014,
    "basic_arithmetic": 0.055,
    "bf": 0.011,
    "binary_alternation": 0.183,
    "binary_matrix": 0.006,
    "bitwise_arithmetic": 0.005,
    "caesar_cipher": 0.021,
    "calendar_arithmetic": 0.111,
    "chain_sum": 0.044,
    "circuit_logic": 0.645,
    "color_cube_rotation": 0.100,
    "complex_arithmetic": 0.024,
    "count_bits": 0.150,
    "count_primes": 0.027,
    "countdown": 0.074,
    "course_schedule": 0.505,
    "cryptarithm": 0.015,
    "decimal_arithmetic": 0.005,
    "decimal_chain_sum": 0.005,
    "dice": 0.036,
    "emoji_mystery": 0.026,
    "family_relationships": 0.170,
    "figlet_font": 0.077,
    "fraction_simplification": 0.055,
    "game_of_life": 0.959,
    "gcd": 0.350,
    "group_anagrams": 0.035,
    "gsm_symbolic": 0.060,
    "jugs": 0.109,
    "kakurasu": 0.025,
    "knights_knaves": 0.473,
    "largest_island": 0.250,
    "lcm": 0.063,
    "leg_counting": 0.023,
    "letter_counting": 0.355,
    "letter_jumble": 0.050,
    "list_functions": 0.100,
    "mahjong_puzzle": 0.525,
    "manipulate_matrix": 0.050,
    "maze": 0.375,
    "mini_sudoku": 0.278,
    "modulo_grid": 0.075,
    "n_queens": 0.100,
    "needle_haystack": 0.050,
    "number_filtering": 0.025,
    "number_format": 0.220,
    "number_sequence": 0.125,
    "number_sorting": 0.005,
    "palindrome_generation": 0.074,
    "palindrome_partitioning": 0.025,
    "path_star": 0.025,
    "polynomial_equations": 0.395,
    "pool_matrix": 0.038,
    "power_function": 0.134,
    "prime_factorization": 0.593,
    "products": 0.041,
    "quantum_lock": 0.063,
    "rearc": 0.074,
    "rectangle_count": 0.456,
    "rotate_matrix": 0.025,
    "rotten_oranges": 0.450,
    "self_reference": 0.325,
    "sentence_reordering": 0.099,
    "shortest_path": 0.375,
    "simple_equations": 0.053,
    "simple_geometry": 0.050,
    "sokoban": 0.100,
    "spell_backward": 0.125,
    "spiral_matrix": 0.025,
    "string_insertion": 0.943,
    "string_manipulation": 0.385,
    "string_splitting": 0.050,
    "string_synthesis": 0.050,
    "sudoku": 0.152,
    "survo": 0.025,
    "syllogism": 0.700,
    "time_intervals": 0.444,
    "tower_of_hanoi": 0.154,
    "tsumego": 0.122,
    "word_sequence_reversal": 0.025,
    "word_sorting": 0.270,
}
"""By generator: the mean score of the best constant answer, among odd ones, the empty one and right ones of
other questions: the score that is possible without reading the question. An upper estimate on 40 to 200
questions."""

_SOMEWHAT_SLOW = (
    "advanced_geometry",
    "arc_agi",
    "countdown",
    "game_of_life",
    "group_anagrams",
    "jugs",
    "polynomial_equations",
    "polynomial_multiplication",
    "quantum_lock",
    "rearc",
    "sudoku",
    "word_ladder",
)

SLOW: Mapping[str, Mapping[str, int]] = {
    **{name: {"num_train": 400, "num_test": 100} for name in _SOMEWHAT_SLOW},
    "sokoban": {"num_train": 200, "num_test": 50},
}
"""The numbers of questions of generators that take 4 to 100 ms for each; 1,000 and 200 for all others."""

LEFT_OUT: Mapping[str, str] = {
    "boxnet": "it gives no right answer",
    "codeio": "its programs draw from the global random generator, so its answers change",
    "coin_flip": "its scorer pays in full for the first digit of the answer",
    "composite": "it mixes other generators, and has no settings of its own",
    "futoshiki": "it takes seconds for a question",
    "game_of_life_halting": "its scorer accepts every answer that is not empty",
    "graph_color": "it gives no right answer",
    "intermediate_integration": "its scorer simplifies what the model wrote, which may not end",
    "isomorphic_strings": "its questions depend on hashes of texts, which differ among processes",
    "knight_swap": "it takes half a second for a question",
    "polynomial_multiplication": "its questions depend on hashes of texts, which differ among processes",
    "propositional_logic": "it gives no right answer",
    "puzzle24": "its scorer accepts any four numbers that make 24",
    "ransom_note": "its questions depend on hashes of texts, which differ among processes",
    "rubiks_cube": "it gives no right answer",
    "rush_hour": "it gives no right answer",
    "simple_integration": "its scorer simplifies what the model wrote, which may not end",
    "word_ladder": "its questions depend on hashes of texts, which differ among processes",
    "zebra_puzzles": "it takes seconds for a question",
}
"""Generators of the library that have no id, and the reason."""

_CLASS = "envs_contrib.reasoning_gym.env:ReasoningGym"

FAMILY: Mapping[str, tuple[str, Mapping[str, object]]] = {
    f"ReasoningGym-{generator}-v0": (
        _CLASS,
        {"generator": generator, "chance": chance, **SLOW.get(generator, {})},
    )
    for generator, chance in CHANCES.items()
}
"""By id: the class of the environment and its arguments (the entry point `ReasoningGym-*-v0`)."""
