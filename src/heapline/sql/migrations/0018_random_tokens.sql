-- Version 18: tokens of leases are random. A sequence goes back with a failover that loses commits, and then gives a lost
-- lease's token to another lease.

DROP SEQUENCE tokens;
