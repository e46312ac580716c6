"""`DataProto`, the batch that role methods take and return: its columns, pickle format and file."""
