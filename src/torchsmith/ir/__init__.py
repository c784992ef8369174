"""Pure values of the road: expressions, Program, Kernel, Plan, and what reads them (no torch)."""

from . import rules as rules  # fills expr.SIMPLIFY, so that nodes are simplified from the first one built
