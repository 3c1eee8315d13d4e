"""What tests assert of a function: exchanges, memory, and golden files of forecasts and layouts."""
