"""What happened and why: explain, logs, debug folders. Fed by events alone; nothing here changes what is compiled."""
