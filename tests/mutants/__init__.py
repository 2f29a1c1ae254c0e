"""Would the tests notice? Small faults planted in the code, each run against its tests.

``python -m tests.mutants broker updater`` (``make mutants``) draws mutants of a package's Python
and Lua, plants each in a copy of the tree, runs the tests of that package and of those that use it
until one fails, and prints how many were killed and which survived. A survivor is a missing test,
or a line that does not matter.

A sampler of our own, because half of what must not break here is Lua, which no mutation tester for
Python knows.
"""
