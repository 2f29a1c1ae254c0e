"""Hostile input for everything that reads bytes which somebody else wrote.

``python -m tests.fuzz`` (``make fuzz``) throws seeded inputs at every target and exits with 1 if
one of them crashed, hung or took too much memory; the input is then in ``build/fuzz``. Once the
fault is fixed, move the input to ``tests/fuzz/finds/TARGET``; ``test_fuzz.py`` runs it from then
on.

``python -m tests.fuzz.raw_requests`` (also of ``make fuzz``) does the same to a gateway, with
requests on real connections; ``python -m tests.fuzz.by_schema`` draws them from its document.

Why not a coverage-guided fuzzer: nearly every format here is msgpack, often behind a digest. Bytes
changed blindly fail the digest; what gets past it is a well-formed value of the wrong type, size or
sign. So most inputs are changed as values and encoded anew, and only the rest as bytes.
"""
