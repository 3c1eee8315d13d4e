"""What a forecast is made of: the machine, the function on it, its arguments, and the compiler."""
