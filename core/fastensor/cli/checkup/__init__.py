"""What ``fastensor doctor`` finds out: pure records, and one function for each that fills it."""
