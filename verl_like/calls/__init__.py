"""One call on a group: split by its dispatch mode, packed, sent, waited for, collected."""
