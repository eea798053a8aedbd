"""The simulator: the same core, an event heap for a clock, and models of links, processors and clients."""
