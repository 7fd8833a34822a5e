"""SGLang and the other engines, on the CPU: throughput, our client, sessions, weights, a killed server."""
