"""Playing many episodes at once: the token agent, groups of siblings, and the producer that starts them."""
