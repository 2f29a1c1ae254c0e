"""The ledger of a run: open tasks, admitted answers, and the outcome of every task.

Every change is one Lua script (``broker/lua``) or one command, and so is atomic:
``issued = applied + buffered + refused + given up + dead + open`` holds at any moment.

Each role has a module: its ledger is a class with what this role may do and nothing else, and its
rights in Redis stand above that class. :mod:`fedstream.broker.rights` makes ACL users from them.
"""
