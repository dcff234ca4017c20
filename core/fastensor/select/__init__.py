"""The choice of the backend for each transfer, by measured timings."""
