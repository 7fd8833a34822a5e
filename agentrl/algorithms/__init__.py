"""What is done to episodes before a gradient: samples, filters, advantages, weights, packing."""
