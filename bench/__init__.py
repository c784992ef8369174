"""Measurements: seeds, compile time, overhead, op_db."""
