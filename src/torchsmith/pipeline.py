"""ONE page: the ordered passes of the road, and the runner that times, verifies, dumps and bisects all of them.

In: a captured fx graph, example inputs, assumptions, options. Out: Compiled(call, guards, report).
"""
