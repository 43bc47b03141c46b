"""How arrays and programs spread over devices: as data, beside the other packages.

``mesh`` says which devices there are and along which axes; ``rules`` maps the logical axes that arrays are declared
with to those mesh axes; ``shard`` is what a program knows of the others while it runs on one of them.  No mesh axis
is named anywhere else.
"""
