//! Writes types as in C.
//!
//! Invariants: the text is bounded in length and in nesting, even if types form loops. `...` stands for omitted
//! parts.

use std::fmt::Write as _;

use super::kinds::{Enumerators, Kind, Members, Parameters};
use super::table::{TypeId, Types};

/// Approximate maximum length of a name, in bytes.
const LONGEST_NAME: usize = 1 << 10;
/// Approximate maximum length of a declaration, in bytes.
const LONGEST_DECLARATION: usize = 256 << 10;
/// Maximum number of consecutive pointers, arrays and modifiers, in case they form a loop.
const MOST_STEPS: u32 = 32;
/// Maximum depth of nested anonymous types and parameter lists, in case they form a loop.
const DEEPEST: u32 = 16;
/// Stands for omitted parts.
const LEFT_OUT: &str = "...";

impl Types {
    /// Writes a type as in C, but without a variable: `unsigned int`, `struct file *`, `char[16]` or, for a pointer
    /// to a function, `int (*)(struct inode *)`. A structure without a name is `struct {...}`.
    #[must_use]
    pub fn name(&self, id: TypeId) -> String {
        self.with_name(id, String::new())
    }

    /// Writes the declaration of a variable `name` of the type as in C: `char name[16]`.
    #[must_use]
    pub fn variable(&self, id: TypeId, name: &str) -> String {
        self.with_name(id, name.to_owned())
    }

    fn with_name(&self, id: TypeId, name: String) -> String {
        let mut printer = Printer {
            types: self,
            left: LONGEST_NAME,
        };
        printer.declare(id, name, None, DEEPEST)
    }

    /// Writes the definition of a type as in C, or the declaration of a function. A structure is written with its
    /// members. The type of a member is written out only if it has no name.
    #[must_use]
    pub fn declaration(&self, id: TypeId) -> String {
        let mut printer = Printer {
            types: self,
            left: LONGEST_DECLARATION,
        };
        let name = self.own_name(id).to_owned();
        let mut text = match self.kind(id) {
            Some(Kind::Struct { .. } | Kind::Enum { .. }) => printer.defined(id, 0, DEEPEST),
            Some(Kind::Typedef(to)) => {
                let to = printer.declare(to, name, Some(0), DEEPEST);
                format!("typedef {to}")
            }
            Some(Kind::Function(prototype)) => printer.declare(prototype, name, None, DEEPEST),
            _ => printer.declare(id, String::new(), Some(0), DEEPEST),
        };
        text.push(';');
        text
    }
}

/// Qualifiers of the type that comes next.
#[derive(Default)]
struct Qualifiers {
    constant: bool,
    volatile: bool,
    restrict: bool,
}

impl Qualifiers {
    fn words(&self) -> String {
        let words = [
            (self.constant, "const"),
            (self.volatile, "volatile"),
            (self.restrict, "restrict"),
        ];
        let said = words.into_iter().filter(|(is_said, _)| *is_said);
        said.map(|(_, word)| word).collect::<Vec<_>>().join(" ")
    }
}

struct Printer<'a> {
    types: &'a Types,
    /// Number of bytes that may still be written.
    left: usize,
}

impl Printer<'_> {
    /// Writes the declaration of `inner` with type `id`; `inner` is a name, or a declarator around a name. With an
    /// `indent`, types without a name are written out.
    fn declare(
        &mut self,
        mut id: TypeId,
        mut inner: String,
        indent: Option<usize>,
        depth: u32,
    ) -> String {
        let mut qualifiers = Qualifiers::default();
        for _ in 0..MOST_STEPS {
            if !self.spend(1) {
                break;
            }
            match self.types.kind(id) {
                Some(Kind::Const(to)) => {
                    qualifiers.constant = true;
                    id = to;
                }
                Some(Kind::Volatile(to)) => {
                    qualifiers.volatile = true;
                    id = to;
                }
                Some(Kind::Restrict(to)) => {
                    qualifiers.restrict = true;
                    id = to;
                }
                Some(Kind::Tag(to)) => id = to,
                Some(Kind::Pointer(to)) => {
                    let words = qualifiers.words();
                    self.spend(words.len() + "(*)".len());
                    inner = format!("*{}", joined(&words, &inner));
                    qualifiers = Qualifiers::default();
                    if self.has_suffix(to) {
                        inner = format!("({inner})");
                    }
                    id = to;
                }
                Some(Kind::Array { element, count }) => {
                    let count = match count {
                        0 => "[]".to_owned(),
                        count => format!("[{count}]"),
                    };
                    self.spend(count.len());
                    inner.push_str(&count);
                    id = element;
                }
                Some(Kind::Prototype {
                    returns,
                    parameters,
                }) => {
                    self.spend("()".len());
                    let parameters = self.parameters(parameters, depth);
                    inner = format!("{inner}({parameters})");
                    qualifiers = Qualifiers::default();
                    id = returns;
                }
                _ => {
                    let words = qualifiers.words();
                    self.spend(words.len());
                    let base = joined(&words, &self.base(id, indent, depth));
                    return joined(&base, &inner);
                }
            }
        }
        joined(&self.left_out(), &inner)
    }

    /// Returns whether C writes a part of the type after the name of the variable, so that a pointer to the type
    /// needs parentheses.
    fn has_suffix(&self, mut id: TypeId) -> bool {
        for _ in 0..MOST_STEPS {
            match self.types.kind(id) {
                Some(Kind::Const(to) | Kind::Volatile(to) | Kind::Restrict(to) | Kind::Tag(to)) => {
                    id = to
                }
                Some(Kind::Array { .. } | Kind::Prototype { .. }) => return true,
                _ => return false,
            }
        }
        false
    }

    /// Writes a type that is neither a modifier nor built from another type.
    fn base(&mut self, id: TypeId, indent: Option<usize>, depth: u32) -> String {
        let name = self.types.own_name(id);
        let keyword = match self.types.kind(id) {
            Some(Kind::Void) => return "void".to_owned(),
            Some(Kind::Struct { union: false, .. } | Kind::Forward { union: false }) => "struct",
            Some(Kind::Struct { union: true, .. } | Kind::Forward { union: true }) => "union",
            Some(Kind::Enum { .. }) => "enum",
            Some(_) if !name.is_empty() => {
                self.spend(name.len());
                return name.to_owned();
            }
            _ => return self.left_out(),
        };
        match (name, indent) {
            ("", Some(indent)) => self.defined(id, indent, depth),
            ("", None) => {
                let text = format!("{keyword} {{{LEFT_OUT}}}");
                self.spend(text.len());
                text
            }
            (name, _) => {
                self.spend(keyword.len() + name.len());
                format!("{keyword} {name}")
            }
        }
    }

    /// Writes a structure, union or enumeration with its contents.
    fn defined(&mut self, id: TypeId, indent: usize, depth: u32) -> String {
        const AROUND: usize = "struct  {\n}".len();
        self.spend(AROUND + indent);
        let (keyword, body) = match (self.types.kind(id), depth.checked_sub(1)) {
            (Some(Kind::Struct { union, members }), Some(depth)) => {
                let keyword = if union { "union" } else { "struct" };
                (keyword, self.members(members, indent + 1, depth))
            }
            (Some(Kind::Enum { signed, values }), Some(_)) => {
                ("enum", self.values(values, signed, indent + 1))
            }
            _ => return self.left_out(),
        };
        let name = joined(keyword, self.types.own_name(id));
        if body.is_empty() {
            return format!("{name} {{}}");
        }
        format!("{name} {{\n{body}{}}}", "\t".repeat(indent))
    }

    fn members(&mut self, members: Members<'_>, indent: usize, depth: u32) -> String {
        let mut body = String::new();
        let tabs = "\t".repeat(indent);
        for field in members {
            let mut name = field.name.to_owned();
            if let Some(width) = field.width {
                let _ = write!(name, ":{width}");
            }
            if !self.spend(indent + name.len() + " ;\n".len()) {
                let _ = writeln!(body, "{tabs}{LEFT_OUT}");
                break;
            }
            let text = self.declare(field.ty, name, Some(indent), depth);
            let _ = writeln!(body, "{tabs}{text};");
        }
        body
    }

    fn values(&mut self, values: Enumerators<'_>, signed: bool, indent: usize) -> String {
        let mut body = String::new();
        let tabs = "\t".repeat(indent);
        for it in values {
            let line = if signed {
                format!("{tabs}{} = {},\n", it.name, it.value)
            } else {
                format!("{tabs}{} = {},\n", it.name, it.value.cast_unsigned())
            };
            if !self.spend(line.len()) {
                let _ = writeln!(body, "{tabs}{LEFT_OUT}");
                break;
            }
            body.push_str(&line);
        }
        body
    }

    fn parameters(&mut self, parameters: Parameters<'_>, depth: u32) -> String {
        let Some(depth) = depth.checked_sub(1) else {
            return self.left_out();
        };
        let mut texts = Vec::new();
        for it in parameters {
            if !self.spend(2 + it.name.len()) {
                texts.push(LEFT_OUT.to_owned());
                break;
            }
            texts.push(if it.ty == TypeId::VOID {
                self.left_out()
            } else {
                self.declare(it.ty, it.name.to_owned(), None, depth)
            });
        }
        if texts.is_empty() {
            return "void".to_owned();
        }
        texts.join(", ")
    }

    /// Returns the text that stands for omitted parts.
    fn left_out(&mut self) -> String {
        self.spend(LEFT_OUT.len());
        LEFT_OUT.to_owned()
    }

    /// Takes `bytes` bytes from those that may still be written. Returns whether that many were left.
    fn spend(&mut self, bytes: usize) -> bool {
        let left = self.left.checked_sub(bytes);
        self.left = left.unwrap_or(0);
        left.is_some()
    }
}

/// Joins two words, with a space between them where C needs one.
fn joined(first: &str, second: &str) -> String {
    if first.is_empty() || second.is_empty() || second.starts_with(['[', ':']) {
        return format!("{first}{second}");
    }
    format!("{first} {second}")
}
