"""Stand-ins that users' own tests may import too."""
