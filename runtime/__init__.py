"""The host side: no model maths, no sockets.

A request enters ``engine``, is planned by ``scheduler``, packed by ``batch``, run by ``step`` and
leaves through ``detokenize``.  ``pages`` owns the KV cache's pages, ``plan`` the compiled programs.
"""
