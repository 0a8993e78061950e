"""What must hold in every run: checks of I1 to I9 that read ports, journal and events, never the code they check."""
