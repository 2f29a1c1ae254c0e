"""Would the tests notice? Small faults planted in a copy of the code, one at a time.

``make mutants`` plants faults in Python with cosmic-ray. A target, ``NAME.toml``, names modules and
the tests that have to fail. ``operators.toml`` leaves out operators that would plant a fault twice,
or in annotations. ``lua.py`` plants faults in the Lua scripts, which no mutation tester for Python
knows. A survivor is a missing test, or a line that does not matter.
"""
