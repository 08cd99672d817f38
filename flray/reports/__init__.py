"""What people read: tables, figures and pages of runs and sweeps."""
