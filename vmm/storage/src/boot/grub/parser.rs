//! The structure of a script of GRUB (`grub-core/script/parser.y`).

use std::rc::Rc;

use super::lexer::{Token, Word, tokens};

/// Maximum depth of blocks in one another.
const MAX_DEPTH: usize = 24;
/// Maximum number of conditions of one `if`.
const MAX_ARMS: usize = 32;

/// Statements, shared by those who run them later.
pub(super) type Block = Rc<Vec<Statement>>;

/// A statement.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Statement {
    /// A command with its arguments, and the block after them.
    Command {
        words: Vec<Word>,
        block: Option<Block>,
    },
    /// Conditions with what to do, and what to do if none holds.
    If {
        arms: Vec<(Block, Block)>,
        otherwise: Block,
    },
    /// `for`, `while` or `until`, with the variable of `for`.
    Loop {
        variable: Option<Word>,
        body: Block,
    },
    Function {
        name: String,
        body: Block,
    },
}

/// Parses a script. Returns what is wrong if it is invalid.
pub(super) fn parse(script: &str) -> Result<Block, String> {
    let tokens = tokens(script)?;
    let mut parser = Parser {
        rest: &tokens,
        depth: 0,
    };
    let block = parser.block(&[])?;
    match parser.rest.first() {
        None => Ok(block),
        Some(_) => Err("a `}` or keyword without its beginning".to_owned()),
    }
}

struct Parser<'a> {
    rest: &'a [Token],
    depth: usize,
}

impl<'a> Parser<'a> {
    fn next(&mut self) -> Option<&'a Token> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    /// Returns the keyword, or other word without quotes, at the front.
    fn front(&self) -> Option<&'a str> {
        match self.rest.first()? {
            Token::Word(word) => word.bare(),
            _ => None,
        }
    }

    fn skip_ends(&mut self) {
        while let Some(Token::End) = self.rest.first() {
            self.next();
        }
    }

    /// Reads statements up to one of the keywords `ends`, which is not consumed, or up to `}`.
    fn block(&mut self, ends: &[&str]) -> Result<Block, String> {
        if self.depth == MAX_DEPTH {
            return Err(format!("blocks are nested more than {MAX_DEPTH} deep"));
        }
        self.depth += 1;
        let mut statements = Vec::new();
        loop {
            self.skip_ends();
            match self.rest.first() {
                None | Some(Token::Close) => break,
                Some(_) if self.front().is_some_and(|word| ends.contains(&word)) => break,
                Some(_) => statements.push(self.statement()?),
            }
        }
        self.depth -= 1;
        Ok(Rc::new(statements))
    }

    /// Consumes the keyword `word`.
    fn expect(&mut self, word: &str) -> Result<(), String> {
        if self.front() == Some(word) {
            self.next();
            Ok(())
        } else {
            Err(format!("there is no `{word}` where one is needed"))
        }
    }

    /// Reads a block with its braces.
    fn braced(&mut self) -> Result<Block, String> {
        self.skip_ends();
        match self.next() {
            Some(Token::Open) => {}
            _ => return Err("there is no `{` where one is needed".to_owned()),
        }
        let block = self.block(&[])?;
        match self.next() {
            Some(Token::Close) => Ok(block),
            _ => Err("a `{` that is not closed".to_owned()),
        }
    }

    fn statement(&mut self) -> Result<Statement, String> {
        match self.front() {
            Some("if") => self.condition(),
            Some("while" | "until") => {
                self.next();
                // The condition runs in the loop, too.
                let condition = self.block(&["do"])?;
                let body = self.loop_body()?;
                let both = Statement::Loop {
                    variable: None,
                    body: condition,
                };
                let arm = Statement::Loop {
                    variable: None,
                    body,
                };
                Ok(Statement::Loop {
                    variable: None,
                    body: Rc::new(vec![both, arm]),
                })
            }
            Some("for") => {
                self.next();
                let variable = match self.next() {
                    Some(Token::Word(word)) => word.clone(),
                    _ => return Err("a `for` without a variable".to_owned()),
                };
                while let Some(Token::Word(_)) = self.rest.first() {
                    self.next();
                }
                self.skip_ends();
                let body = self.loop_body()?;
                let variable = Some(variable);
                Ok(Statement::Loop { variable, body })
            }
            Some("function") => {
                self.next();
                let name = self.front().map(str::to_owned);
                let name = name.ok_or("a function without a name")?;
                self.next();
                let body = self.braced()?;
                Ok(Statement::Function { name, body })
            }
            Some(word @ ("then" | "else" | "elif" | "fi" | "do" | "done")) => {
                Err(format!("a `{word}` without its beginning"))
            }
            _ => self.command(),
        }
    }

    fn loop_body(&mut self) -> Result<Block, String> {
        self.expect("do")?;
        let body = self.block(&["done"])?;
        self.expect("done")?;
        Ok(body)
    }

    fn condition(&mut self) -> Result<Statement, String> {
        let mut arms = Vec::new();
        // The keyword is `if` or `elif`.
        while let Some("if" | "elif") = self.front() {
            if arms.len() == MAX_ARMS {
                return Err(format!("an `if` with more than {MAX_ARMS} conditions"));
            }
            if !arms.is_empty() && self.front() == Some("if") {
                return Err("an `if` where `fi` is needed".to_owned());
            }
            self.next();
            let condition = self.block(&["then"])?;
            self.expect("then")?;
            arms.push((condition, self.block(&["elif", "else", "fi"])?));
        }
        let otherwise = match self.front() {
            Some("else") => {
                self.next();
                self.block(&["fi"])?
            }
            _ => Block::default(),
        };
        self.expect("fi")?;
        Ok(Statement::If { arms, otherwise })
    }

    fn command(&mut self) -> Result<Statement, String> {
        let mut words = Vec::new();
        let mut block = None;
        loop {
            match self.rest.first() {
                Some(Token::Word(word)) if block.is_none() => {
                    words.push(word.clone());
                    self.next();
                }
                Some(Token::Open) if block.is_none() && !words.is_empty() => {
                    block = Some(self.braced()?);
                }
                None | Some(Token::End | Token::Close) => break,
                Some(_) => return Err("a `{` or word where the line must end".to_owned()),
            }
        }
        Ok(Statement::Command { words, block })
    }
}
