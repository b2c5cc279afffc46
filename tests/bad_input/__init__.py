"""Bad input by table: the values that are tried, a call of each public function, and the values that each of
its arguments takes."""
