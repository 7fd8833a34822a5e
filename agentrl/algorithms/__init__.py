"""From episodes to the inputs of a gradient: samples, filters, advantages, weights, packing."""
