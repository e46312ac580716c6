"""`DataProto`, the batch that every role method takes and returns: columns, rows, pieces, file and wire format."""
