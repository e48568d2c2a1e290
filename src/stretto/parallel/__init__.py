"""Links between devices: within a process, between processes of a host, between hosts."""
