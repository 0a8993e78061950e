"""What goes wrong in virtual time: the list of faults, and wrappers of the ports that inject them."""
