"""`DataProto`, the batch that every role method takes and returns, as rows, pickle and file."""
