"""The data service: samples are read and decoded once for all ranks, and pushed to them before they ask."""
