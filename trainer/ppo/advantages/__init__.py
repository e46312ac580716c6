"""Advantage estimators."""
