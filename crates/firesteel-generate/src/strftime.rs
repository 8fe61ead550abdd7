//! The local time as chat templates see it: Python's `strftime` on Linux in the C locale.

use jiff::fmt::strtime;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ZonedDateTime};
use std::borrow::Cow;
use std::time::SystemTime;

/// Bytes that one byte of a long format can become at most: `%f` is three times as long before the C
/// library has it, which gets room for less than 512 characters for each of its characters.
pub(crate) const LONGEST: usize = 3 * 512;

/// A moment in a time zone, of which a chat template writes date and clock.
#[derive(Debug, Clone)]
pub struct LocalTime(ZonedDateTime);

impl LocalTime {
    /// The present in the zone of the system, which `TZ` and /etc/localtime tell; UTC where they
    /// tell none.
    pub fn now() -> Self {
        Self(ZonedDateTime::now())
    }

    /// `time` in the zone of the system; `None` for years that no calendar of four digits has.
    pub fn of(time: SystemTime) -> Option<Self> {
        Some(Self(Timestamp::try_from(time).ok()?.to_zoned_datetime(TimeZone::system())))
    }

    /// The same moment in the zone of a rule as POSIX has it in `TZ`, such as
    /// `CET-1CEST,M3.5.0,M10.5.0/3`; `None` where it is no such rule.
    pub fn in_zone(&self, rule: &str) -> Option<Self> {
        Some(Self(self.0.timestamp().to_zoned_datetime(TimeZone::posix(rule).ok()?)))
    }

    /// The time as `datetime.now().strftime(format)` of Python writes it. The time of Python knows
    /// no zone, so `%z` and `%Z` are empty. What is no directive stands for itself.
    pub(crate) fn strftime(&self, format: &str) -> String {
        let format = self.python_directives(format);
        // Python gives the C library this much room, and takes what does not fit for empty.
        let length = format.chars().count().saturating_mul(256);
        let room = std::iter::successors(Some(1024usize), |room| room.checked_mul(2));
        let room = room.into_iter().find(|room| *room >= length).unwrap_or(usize::MAX);
        let mut written = Written { text: String::new(), left: room - 1 };
        match self.write(&format, &mut written) {
            Some(()) => written.text,
            None => String::new(),
        }
    }

    /// `format` without the directives that Python does itself, which it knows by their letter
    /// alone.
    fn python_directives(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len());
        let mut rest = format;
        while let Some((before, after)) = rest.split_once('%') {
            out.push_str(before);
            let mut characters = after.chars();
            rest = match characters.next() {
                Some('z' | 'Z') => characters.as_str(),
                Some(':') if characters.as_str().starts_with('z') => &characters.as_str()[1..],
                Some('f') => {
                    let microseconds = self.0.subsec_nanosecond() / 1000;
                    out.push_str(&format!("{microseconds:06}"));
                    characters.as_str()
                }
                other => {
                    out.push('%');
                    out.extend(other);
                    characters.as_str()
                }
            };
        }
        out + rest
    }

    /// `strftime` of the C library. `None` when there is no room.
    fn write(&self, format: &str, out: &mut Written) -> Option<()> {
        let mut rest = format;
        while let Some((before, after)) = rest.split_once('%') {
            out.push(before)?;
            let directive = Directive::parse(after);
            rest = directive.rest;
            // At the end of a text the spelling ends with it.
            let spelling = &after[..after.len() - rest.len()];
            match directive.letter.and_then(|letter| self.field(letter, directive.modifier)) {
                Some(Field::Number(number)) => out.number(&directive, &number)?,
                Some(Field::Word { text, lower }) => {
                    let text = match directive.swaps && lower {
                        true => text.to_lowercase(),
                        false if directive.upper || directive.swaps => text.to_uppercase(),
                        false => text,
                    };
                    out.padded(&directive, &text)?;
                }
                Some(Field::Fixed(text)) => out.padded(&directive, &text)?,
                Some(Field::Parts(format)) => {
                    let mut parts = Written { text: String::new(), left: out.left };
                    self.write(format, &mut parts)?;
                    let text = parts.text;
                    let text = if directive.upper { text.to_uppercase() } else { text };
                    out.padded(&directive, &text)?;
                }
                Some(Field::Nothing) => {}
                None => {
                    let spelling = format!("%{spelling}");
                    let upper = || spelling.chars().map(upper).collect();
                    let text = if directive.upper { upper() } else { spelling };
                    out.padded(&directive, &text)?;
                }
            }
        }
        out.push(rest)
    }

    /// What a directive stands for; `None` where there is no such directive.
    fn field(&self, letter: char, modifier: Option<char>) -> Option<Field> {
        let refused = match letter {
            'a' | 'A' | 'D' | 'F' => modifier.is_some(),
            'c' | 'x' | 'X' | 'Y' => modifier == Some('O'),
            'b' | 'h' | 'B' | 'd' | 'e' | 'g' | 'G' | 'H' | 'I' | 'j' | 'k' | 'l' | 'm' | 'M'
            | 'S' | 'U' | 'V' | 'w' | 'W' => modifier == Some('E'),
            _ => false,
        };
        if refused {
            return None;
        }
        let time = &self.0;
        let word = |directive: &str| strtime::format(directive, time).unwrap_or_default();
        let hour_of_12 = (time.hour() + 11) % 12 + 1;
        let week = time.date().iso_week_date();
        let from_sunday = i64::from(time.weekday().to_sunday_zero_offset());
        let from_monday = i64::from(time.weekday().to_monday_zero_offset());
        // The first of the days that a week begins with begins week 1.
        let week_of_year = |day: i64| (i64::from(time.day_of_year()) + 6 - day) / 7;
        let number = |value, digits| Some(Field::Number(Number { value, digits, spaces: false }));
        let spaced = |value| Some(Field::Number(Number { value, digits: 2, spaces: true }));
        match letter {
            'a' => Some(Field::Word { text: word("%a"), lower: false }),
            'A' => Some(Field::Word { text: word("%A"), lower: false }),
            'b' | 'h' => Some(Field::Word { text: word("%b"), lower: false }),
            'B' => Some(Field::Word { text: word("%B"), lower: false }),
            'p' => Some(Field::Word { text: word("%p"), lower: true }),
            'P' => Some(Field::Fixed(if time.hour() < 12 { "am" } else { "pm" }.into())),
            'Z' => Some(Field::Fixed("".into())),
            'z' => Some(Field::Nothing),
            '%' => Some(Field::Fixed("%".into())),
            'n' => Some(Field::Fixed("\n".into())),
            't' => Some(Field::Fixed("\t".into())),
            'c' => Some(Field::Parts("%a %b %e %H:%M:%S %Y")),
            'D' | 'x' => Some(Field::Parts("%m/%d/%y")),
            'F' => Some(Field::Parts("%Y-%m-%d")),
            'r' => Some(Field::Parts("%I:%M:%S %p")),
            'R' => Some(Field::Parts("%H:%M")),
            'T' | 'X' => Some(Field::Parts("%H:%M:%S")),
            'C' => number(i64::from(time.year()).div_euclid(100), 1),
            'y' => number(i64::from(time.year()).rem_euclid(100), 2),
            'Y' => number(time.year().into(), 1),
            'g' => number(i64::from(week.year()).rem_euclid(100), 2),
            'G' => number(week.year().into(), 1),
            'V' => number(week.week().into(), 2),
            'U' => number(week_of_year(from_sunday), 2),
            'W' => number(week_of_year(from_monday), 2),
            'u' => number(from_monday + 1, 1),
            'w' => number(from_sunday, 1),
            'j' => number(time.day_of_year().into(), 3),
            'm' => number(time.month().into(), 2),
            'd' => number(time.day().into(), 2),
            'e' => spaced(time.day().into()),
            'H' => number(time.hour().into(), 2),
            'k' => spaced(time.hour().into()),
            'I' => number(hour_of_12.into(), 2),
            'l' => spaced(hour_of_12.into()),
            'M' => number(time.minute().into(), 2),
            'S' => number(time.second().into(), 2),
            's' => Some(Field::Fixed(time.timestamp().as_second().to_string().into())),
            _ => None,
        }
    }
}

/// A directive without its percent sign, and what follows it.
struct Directive<'a> {
    /// What fills a field up, if it is said.
    pad: Option<char>,
    /// Whether words are in capital letters.
    upper: bool,
    /// Whether words are in the other kind of letters.
    swaps: bool,
    /// The least characters.
    width: usize,
    modifier: Option<char>,
    /// What it stands for; `None` at the end of the text.
    letter: Option<char>,
    rest: &'a str,
}

impl<'a> Directive<'a> {
    fn parse(text: &'a str) -> Self {
        let mut directive = Self {
            pad: None,
            upper: false,
            swaps: false,
            width: 0,
            modifier: None,
            letter: None,
            rest: text,
        };
        let mut characters = text.chars();
        let mut next = characters.next();
        while let Some(flag) = next {
            match flag {
                '_' | '-' | '0' => directive.pad = Some(flag),
                '^' => directive.upper = true,
                '#' => directive.swaps = true,
                _ => break,
            }
            next = characters.next();
        }
        while let Some(digit) = next.and_then(|c| c.to_digit(10)) {
            directive.width = directive.width.saturating_mul(10).saturating_add(digit as usize);
            next = characters.next();
        }
        if let Some('E' | 'O') = next {
            directive.modifier = next;
            next = characters.next();
        }
        directive.letter = next;
        directive.rest = characters.as_str();
        directive
    }
}

/// What a directive stands for.
enum Field {
    Number(Number),
    /// A text whose case flags change; `lower` says which the other case is.
    Word {
        text: String,
        lower: bool,
    },
    /// A text that is what it is.
    Fixed(Cow<'static, str>),
    /// Directives for the parts.
    Parts(&'static str),
    /// Not even padding.
    Nothing,
}

struct Number {
    value: i64,
    /// The least digits.
    digits: usize,
    /// Whether spaces fill it up, not zeros.
    spaces: bool,
}

/// A text in a bounded room.
struct Written {
    text: String,
    /// Characters that still have room.
    left: usize,
}

impl Written {
    fn push(&mut self, text: &str) -> Option<()> {
        self.left = self.left.checked_sub(text.chars().count())?;
        self.text.push_str(text);
        Some(())
    }

    fn fill(&mut self, with: char, count: usize) -> Option<()> {
        self.left = self.left.checked_sub(count)?;
        self.text.extend(std::iter::repeat_n(with, count));
        Some(())
    }

    /// A text behind what fills it up to the width of the directive.
    fn padded(&mut self, directive: &Directive<'_>, text: &str) -> Option<()> {
        let with = if directive.pad == Some('0') { '0' } else { ' ' };
        self.fill(with, directive.width.saturating_sub(text.chars().count()))?;
        self.push(text)
    }

    fn number(&mut self, directive: &Directive<'_>, number: &Number) -> Option<()> {
        let sign = if number.value < 0 { "-" } else { "" };
        let digits = number.value.unsigned_abs().to_string();
        let pad = match directive.pad {
            None if number.spaces => '_',
            pad => pad.unwrap_or('0'),
        };
        let width = directive.width.max(if pad == '-' { 0 } else { number.digits });
        let missing = width.saturating_sub(sign.len() + digits.len());
        let (spaces, zeros) = if pad == '0' { (0, missing) } else { (missing, 0) };
        self.fill(' ', spaces)?;
        self.push(sign)?;
        self.fill('0', zeros)?;
        self.push(&digits)
    }
}

/// The capital letter of a letter that has one.
fn upper(letter: char) -> char {
    let mut upper = letter.to_uppercase();
    match (upper.next(), upper.next()) {
        (Some(upper), None) => upper,
        _ => letter,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const BERLIN: &str = "CET-1CEST,M3.5.0,M10.5.0/3";

    fn time(seconds: f64, zone: &str) -> LocalTime {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds);
        LocalTime::of(time).unwrap().in_zone(zone).unwrap()
    }

    #[test]
    fn times_are_those_of_a_zone() {
        let format = "%Y-%m-%d %H:%M:%S %j %a";
        let cases = [
            (0.0, "UTC0", "1970-01-01 00:00:00 001 Thu"),
            (0.0, "EST5EDT,M3.2.0,M11.1.0", "1969-12-31 19:00:00 365 Wed"),
            (0.0, "<+0530>-5:30", "1970-01-01 05:30:00 001 Thu"),
            // The second before the clock is put forward, and the next one.
            (1_774_745_999.0, BERLIN, "2026-03-29 01:59:59 088 Sun"),
            (1_774_746_000.0, BERLIN, "2026-03-29 03:00:00 088 Sun"),
            (951_782_399.0, "UTC0", "2000-02-28 23:59:59 059 Mon"),
            (951_782_400.0, "UTC0", "2000-02-29 00:00:00 060 Tue"),
            (978_220_800.0, "UTC0", "2000-12-31 00:00:00 366 Sun"),
            (4_107_542_400.0, "UTC0", "2100-03-01 00:00:00 060 Mon"),
            (16_725_225_600.0, "UTC0", "2500-01-01 00:00:00 001 Fri"),
        ];
        for (seconds, zone, expected) in cases {
            assert_eq!(time(seconds, zone).strftime(format), expected, "{seconds} {zone}");
        }
        assert!(time(0.0, "UTC0").in_zone("no rule").is_none());
    }

    /// Against CPython with the GNU C library.
    #[test]
    fn directives_are_those_of_python() {
        // Tuesday, 3 February 2026, 04:05:06.5 in New York.
        let time = time(1_770_109_506.5, "EST5EDT,M3.2.0,M11.1.0");
        let cases = [
            ("%a %A %b %B %h %p %P", "Tue Tuesday Feb February Feb AM am"),
            ("%C %y %Y %g %G %V %U %W %u %w", "20 26 2026 26 2026 06 05 05 2 2"),
            (
                "%d|%e|%H|%I|%k|%l|%m|%M|%S|%j|%f",
                "03|\u{20}3|04|04|\u{20}4|\u{20}4|02|05|06|034|500000",
            ),
            (
                "%c|%D|%F|%r|%R|%T|%x|%X",
                "Tue Feb  3 04:05:06 2026|02/03/26|2026-02-03|04:05:06 AM|04:05|04:05:06|02/03/26|04:05:06",
            ),
            ("%s %% %n%t|", "1770109506 % \n\t|"),
            // The time has no zone.
            ("[%z%Z%:z%5Z%5z]", "[     ]"),
            ("%-d|%_d|%0e|%-5d|%_5d|%5d|%05e|%-j", "3| 3|03|    3|    3|00003|00003|34"),
            (
                "%^a|%#B|%#p|%^#p|%10a|%010a|%^c|%#c",
                "TUE|FEBRUARY|am|am|       Tue|0000000Tue|TUE FEB  3 04:05:06 2026|Tue Feb  3 04:05:06 2026",
            ),
            ("%Od|%EY|%Ob|%5Ey|%OS|%E%", "03|2026|Feb|00026|06|%"),
            ("%20s|%020s|%12F", "          1770109506|00000000001770109506|  2026-02-03"),
            // No directives.
            ("%Q %5Q %^q %Ed %OY %+d %-f %字 é% ", "%Q   %5Q %^Q %Ed %OY %+d %-f %字 é% "),
            ("%", "%"),
            ("%%f|%-", "%f|%-"),
            ("", ""),
            // What is longer than the room that Python gives it is empty.
            ("%2047d", &format!("{:02047}", 3)),
            ("%2048d", ""),
            ("%99999999999999999999d", ""),
            // The letter alone is the directive, and its digits are a width here.
            ("%5%f|", ""),
        ];
        for (format, expected) in cases {
            assert_eq!(time.strftime(format), expected, "{format}");
        }
    }
}
