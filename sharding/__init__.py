"""How arrays lie on a mesh of devices."""
