"""The parts of ``fastensor doctor``: software, folder and measurement. Each finds out, describes and advises."""
