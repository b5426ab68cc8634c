// How codes lie, by their form. Included inside the anonymous namespace of a set's file.

constexpr bool is_table(CodeForm form) { return form == CodeForm::threes_table || form == CodeForm::fours_table; }
constexpr bool has_tops(CodeForm form) { return form == CodeForm::threes || form == CodeForm::threes_table || form == CodeForm::fives; }
// Levels of their own sign; the others are codes from 0 to 63.
constexpr bool is_signed(CodeForm form) { return is_table(form) || form == CodeForm::bytes; }
constexpr int steps_of_16(CodeForm form) {
  switch (form) {
    case CodeForm::bytes: return 4;
    case CodeForm::sixes: return 3;
    case CodeForm::fours: case CodeForm::fours_table: case CodeForm::fives: return 2;
    default: return 1;
  }
}

