"""Playing many episodes at once: the token agent, groups of siblings, and who starts them."""
