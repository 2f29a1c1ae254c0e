"""The ledger of a run: open tasks, admitted answers, and the outcome of every task.

Every change is one Lua script (``broker/lua``) or one command, and so is atomic:
``issued = applied + buffered + refused + given up + dead + open`` holds at any moment.

Each role has a module with its ledger, a class with only the operations that this role may do.
Above the class stand the role's rights in Redis, from which :mod:`fedstream.broker.rights` makes
ACL users.
"""
